import java.io.IOException;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.functions.FlatMapFunction;
import org.apache.flink.api.common.functions.MapFunction;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.connector.sink2.Sink;
import org.apache.flink.api.connector.sink2.SinkWriter;
import org.apache.flink.api.connector.sink2.WriterInitContext;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.file.src.FileSource;
import org.apache.flink.connector.file.src.reader.TextLineInputFormat;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.source.legacy.RichParallelSourceFunction;
import org.apache.flink.streaming.api.functions.windowing.ProcessAllWindowFunction;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/** Flink in one JVM, with its default configuration. See the package's __init__.py for arguments and answer. */
public class Flink {
  static final int MASK = (1 << 20) - 1;
  static final Map<String, String> GIVEN = new HashMap<>();
  static String workload, data;
  static long records, rate, seconds;
  static int parallelism;

  static class Words {
    static final String[] ALL = lines("words.txt").toArray(new String[0]);
  }

  static class Events {
    static final int[] USER = new int[MASK + 1], LATENESS = new int[MASK + 1];
    static final double[] VALUE = new double[MASK + 1];

    static {
      int k = 0;
      for (String line : lines("events.csv")) {
        String[] fields = line.split(",");
        USER[k] = Integer.parseInt(fields[0]);
        LATENESS[k] = Integer.parseInt(fields[1]);
        VALUE[k++] = Double.parseDouble(fields[2]);
      }
    }

    static long time(long i) {
      return i / 10 + 1000 - LATENESS[(int) (i & MASK)];
    }
  }

  static List<String> lines(String name) {
    try {
      return Files.readAllLines(Path.of(data, name));
    } catch (IOException error) {
      throw new RuntimeException(error);
    }
  }

  /** A meter for each subtask of the sink; only its own thread writes to it. */
  static class Meter {
    final long begunAt = System.nanoTime(), begunCpu = SYSTEM.getProcessCpuTime();
    long outputs, checksum, lastAt, lastCpu;
    long[] ages = new long[1 << 16];
    int aged;
  }

  static final Meter[] METERS = new Meter[64];
  static final com.sun.management.OperatingSystemMXBean SYSTEM =
      (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();

  static class MeteredSink<T> implements Sink<T> {
    public SinkWriter<T> createWriter(WriterInitContext context) {
      final Meter meter = METERS[context.getTaskInfo().getIndexOfThisSubtask()] = new Meter();
      return new SinkWriter<T>() {
        public void write(T row, Context unused) {
          meter.outputs++;
          if (row instanceof Tuple3) {
            if (meter.aged == meter.ages.length) meter.ages = Arrays.copyOf(meter.ages, 2 * meter.aged);
            meter.ages[meter.aged++] = System.nanoTime() - (Long) ((Tuple3<?, ?, ?>) row).f2;
          } else {
            Object value = ((Tuple2<?, ?>) row).f1;
            meter.checksum += value instanceof Double ? (long) ((Double) value * 8) : (Long) value;
          }
        }

        public void flush(boolean end) {
          meter.lastAt = System.nanoTime();
          meter.lastCpu = SYSTEM.getProcessCpuTime();
        }

        public void close() {}
      };
    }
  }

  /** Record i of the pool. With two subtasks, each has every second one, so that event time advances together. */
  abstract static class Made<T> implements MapFunction<Long, T> {
    public T map(Long x) {
      long half = records / 2;
      return make(parallelism < 2 ? x : x < half ? 2 * x : 2 * (x - half) + 1);
    }

    abstract T make(long i);
  }

  static class Word extends Made<String> {
    String make(long i) {
      return Words.ALL[(int) (i & MASK)];
    }
  }

  static class Event extends Made<Tuple3<Integer, Double, Long>> {
    Tuple3<Integer, Double, Long> make(long i) {
      int k = (int) (i & MASK);
      return Tuple3.of(Events.USER[k], Events.VALUE[k], Events.time(i));
    }
  }

  static class Bid extends Made<Tuple2<String, Long>> {
    Tuple2<String, Long> make(long i) {
      return Tuple2.of(Words.ALL[(int) (i & MASK)], Events.time(i));
    }
  }

  static class Number extends Made<Long> {
    Long make(long i) {
      return i;
    }
  }

  static class ParsedWord extends RichMapFunction<String, String> {
    transient ObjectMapper mapper;

    public void open(OpenContext context) {
      mapper = new ObjectMapper();
    }

    public String map(String line) throws Exception {
      return mapper.readTree(line).get("word").asText();
    }
  }

  static class ParsedEvent extends RichMapFunction<String, Tuple3<Integer, Double, Long>> {
    transient ObjectMapper mapper;

    public void open(OpenContext context) {
      mapper = new ObjectMapper();
    }

    public Tuple3<Integer, Double, Long> map(String line) throws Exception {
      JsonNode node = mapper.readTree(line);
      return Tuple3.of(node.get("user").asInt(), node.get("value").asDouble(), node.get("ts").asLong());
    }
  }

  static class RunningCount extends RichMapFunction<String, Tuple2<String, Long>> {
    transient ValueState<Long> count;

    public void open(OpenContext context) {
      count = getRuntimeContext().getState(new ValueStateDescriptor<>("count", Types.LONG));
    }

    public Tuple2<String, Long> map(String word) throws Exception {
      Long held = count.value();
      long now = held == null ? 1 : held + 1;
      count.update(now);
      return Tuple2.of(word, now);
    }
  }

  static class AgedCount extends RichMapFunction<Tuple2<String, Long>, Tuple3<String, Long, Long>> {
    transient ValueState<Long> count;

    public void open(OpenContext context) {
      count = getRuntimeContext().getState(new ValueStateDescriptor<>("count", Types.LONG));
    }

    public Tuple3<String, Long, Long> map(Tuple2<String, Long> row) throws Exception {
      Long held = count.value();
      long now = held == null ? 1 : held + 1;
      count.update(now);
      return Tuple3.of(row.f0, now, row.f1);
    }
  }

  /** `rate` records a second in all, made each millisecond. */
  static class Paced extends RichParallelSourceFunction<Tuple2<String, Long>> {
    volatile boolean running = true;

    public void run(SourceContext<Tuple2<String, Long>> context) throws Exception {
      long i = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
      long begun = System.nanoTime();
      for (long tick = 0; tick < seconds * 1000 && running; tick++) {
        long due = begun + tick * 1_000_000;
        for (long now = System.nanoTime(); now < due; now = System.nanoTime()) {
          java.util.concurrent.locks.LockSupport.parkNanos(due - now);
        }
        for (long k = 0; k < rate / 1000 / parallelism; k++, i += parallelism) {
          context.collect(Tuple2.of(Words.ALL[(int) (i & MASK)], System.nanoTime()));
        }
      }
    }

    public void cancel() {
      running = false;
    }
  }

  static class CountAndSum implements AggregateFunction<Tuple3<Integer, Double, Long>, Tuple2<Long, Double>, Tuple2<Long, Double>> {
    public Tuple2<Long, Double> createAccumulator() {
      return Tuple2.of(0L, 0.0);
    }

    public Tuple2<Long, Double> add(Tuple3<Integer, Double, Long> event, Tuple2<Long, Double> held) {
      held.f0 += 1;
      held.f1 += event.f1;
      return held;
    }

    public Tuple2<Long, Double> getResult(Tuple2<Long, Double> held) {
      return held;
    }

    public Tuple2<Long, Double> merge(Tuple2<Long, Double> a, Tuple2<Long, Double> b) {
      return Tuple2.of(a.f0 + b.f0, a.f1 + b.f1);
    }
  }

  static class Count implements AggregateFunction<Tuple2<String, Long>, Long, Long> {
    public Long createAccumulator() {
      return 0L;
    }

    public Long add(Tuple2<String, Long> bid, Long held) {
      return held + 1;
    }

    public Long getResult(Long held) {
      return held;
    }

    public Long merge(Long a, Long b) {
      return a + b;
    }
  }

  static class Named extends ProcessWindowFunction<Long, Tuple2<String, Long>, String, TimeWindow> {
    public void process(String key, Context context, Iterable<Long> counts, Collector<Tuple2<String, Long>> out) {
      out.collect(Tuple2.of(key, counts.iterator().next()));
    }
  }

  static class Greatest extends ProcessAllWindowFunction<Tuple2<String, Long>, Tuple2<String, Long>, TimeWindow> {
    public void process(Context context, Iterable<Tuple2<String, Long>> counts, Collector<Tuple2<String, Long>> out) {
      Tuple2<String, Long> best = null;
      for (Tuple2<String, Long> count : counts) if (best == null || count.f1 > best.f1) best = count;
      out.collect(best);
    }
  }

  static DataStream<String> text(StreamExecutionEnvironment env) {
    var path = new org.apache.flink.core.fs.Path(Path.of(data, workload + "-" + records + ".jsonl").toString());
    return env.fromSource(FileSource.forRecordStreamFormat(new TextLineInputFormat(), path).build(), WatermarkStrategy.noWatermarks(), "lines");
  }

  static void build(StreamExecutionEnvironment env) {
    TypeInformation<Tuple2<String, Long>> named = Types.TUPLE(Types.STRING, Types.LONG);
    TypeInformation<Tuple3<Integer, Double, Long>> event = Types.TUPLE(Types.INT, Types.DOUBLE, Types.LONG);
    DataStream<Long> numbers = workload.matches("w[1-46]") ? env.fromSequence(0, records - 1) : null;
    switch (workload) {
      case "w1", "w6", "w1json" -> {
        DataStream<String> words =
            numbers == null ? text(env).map(new ParsedWord()).returns(Types.STRING) : numbers.map(new Word()).returns(Types.STRING);
        words.keyBy(word -> word, Types.STRING).map(new RunningCount()).returns(named).sinkTo(new MeteredSink<>());
      }
      case "w2", "w2json" -> {
        DataStream<Tuple3<Integer, Double, Long>> events =
            numbers == null ? text(env).map(new ParsedEvent()).returns(event) : numbers.map(new Event()).returns(event);
        TypeInformation<Tuple2<Long, Double>> sums = Types.TUPLE(Types.LONG, Types.DOUBLE);
        events
            .assignTimestampsAndWatermarks(
                WatermarkStrategy.<Tuple3<Integer, Double, Long>>forBoundedOutOfOrderness(Duration.ofSeconds(1))
                    .withTimestampAssigner((row, before) -> row.f2))
            .keyBy(row -> row.f0, Types.INT)
            .window(TumblingEventTimeWindows.of(Duration.ofSeconds(10)))
            .aggregate(new CountAndSum(), sums, sums)
            .sinkTo(new MeteredSink<>());
      }
      case "w3" -> {
        TypeInformation<Tuple2<Long, Long>> pair = Types.TUPLE(Types.LONG, Types.LONG);
        numbers
            .map(new Number())
            .returns(Types.LONG)
            .map(x -> (x * 31 + 7) & 0x7fffffffL)
            .returns(Types.LONG)
            .filter(x -> (x & 3) != 0)
            .map(x -> Tuple2.of(x & 1023, x))
            .returns(pair)
            .flatMap((FlatMapFunction<Tuple2<Long, Long>, Tuple2<Long, Long>>) (row, out) -> {
              out.collect(row);
              out.collect(Tuple2.of(row.f0, row.f1 >> 1));
            })
            .returns(pair)
            .sinkTo(new MeteredSink<>());
      }
      case "w4" ->
          numbers
              .map(new Bid())
              .returns(named)
              .assignTimestampsAndWatermarks(
                  WatermarkStrategy.<Tuple2<String, Long>>forBoundedOutOfOrderness(Duration.ofSeconds(1))
                      .withTimestampAssigner((row, before) -> row.f1))
              .keyBy(row -> row.f0, Types.STRING)
              .window(SlidingEventTimeWindows.of(Duration.ofSeconds(10), Duration.ofSeconds(2)))
              .aggregate(new Count(), new Named(), Types.LONG, Types.LONG, named)
              .windowAll(TumblingEventTimeWindows.of(Duration.ofSeconds(2)))
              .process(new Greatest())
              .returns(named)
              .sinkTo(new MeteredSink<>());
      case "w5" ->
          env.addSource(new Paced())
              .returns(named)
              .keyBy(row -> row.f0, Types.STRING)
              .map(new AgedCount())
              .returns(Types.TUPLE(Types.STRING, Types.LONG, Types.LONG))
              .sinkTo(new MeteredSink<>());
      default -> throw new IllegalArgumentException("unknown workload " + workload);
    }
  }

  static long number(String name) {
    return Long.parseLong(GIVEN.getOrDefault(name, "0"));
  }

  public static void main(String[] arguments) throws Exception {
    for (String argument : arguments) GIVEN.put(argument.split("=", 2)[0], argument.split("=", 2)[1]);
    workload = GIVEN.get("workload");
    data = GIVEN.get("data");
    records = number("records");
    parallelism = (int) number("parallelism");
    rate = number("rate");
    seconds = number("seconds");
    long every = Math.round(1000 * Double.parseDouble(GIVEN.getOrDefault("every_s", "0")));
    Configuration configuration = new Configuration();
    configuration.setString("rest.bind-port", "0");
    if (every > 0) {
      configuration.setString("execution.checkpointing.storage", "filesystem");
      configuration.setString("execution.checkpointing.dir", Files.createTempDirectory(Path.of(data), "checkpoints").toUri().toString());
    }
    StreamExecutionEnvironment env = StreamExecutionEnvironment.createLocalEnvironment(parallelism, configuration);
    if (every > 0) env.enableCheckpointing(every);
    if (GIVEN.containsKey("reuse")) env.getConfig().enableObjectReuse();
    if (GIVEN.containsKey("buffer_ms")) env.setBufferTimeout(number("buffer_ms"));
    if (!workload.endsWith("json")) {
      // The pools are read before the clock starts.
      Words.ALL[0].length();
      Events.USER[0] += 0;
    }
    build(env);
    env.execute(workload);
    long outputs = 0, checksum = 0;
    // From the first opening to the last output of any subtask; all are in one process.
    long begunAt = Long.MAX_VALUE, begunCpu = Long.MAX_VALUE, lastAt = Long.MIN_VALUE, lastCpu = 0;
    List<long[]> ages = new ArrayList<>();
    for (Meter meter : METERS) {
      if (meter == null || meter.outputs == 0) continue;
      outputs += meter.outputs;
      checksum += meter.checksum;
      begunAt = Math.min(begunAt, meter.begunAt);
      begunCpu = Math.min(begunCpu, meter.begunCpu);
      lastAt = Math.max(lastAt, meter.lastAt);
      lastCpu = Math.max(lastCpu, meter.lastCpu);
      ages.add(Arrays.copyOfRange(meter.ages, meter.aged * 3 / 10, meter.aged));
    }
    long peak = 0;
    for (String line : Files.readAllLines(Path.of("/proc/self/status")))
      if (line.startsWith("VmHWM")) peak = Long.parseLong(line.replaceAll("\\D", "")) / 1024;
    if (workload.equals("w5")) {
      long[] all = ages.stream().flatMapToLong(Arrays::stream).sorted().toArray();
      System.out.printf(Locale.ROOT, "{\"outputs\": %d, \"p50_ms\": %.3f, \"p90_ms\": %.3f, \"p99_ms\": %.3f, \"max_ms\": %.3f}%n", outputs,
          all[all.length / 2] / 1e6, all[all.length * 9 / 10] / 1e6, all[all.length * 99 / 100] / 1e6, all[all.length - 1] / 1e6);
    } else {
      System.out.printf(Locale.ROOT,
          "{\"outputs\": %d, \"checksum\": %d, \"steady_per_s\": %.0f, \"steady_per_cpu_s\": %.0f, \"peak_mb\": %d}%n", outputs, checksum,
          records * 1e9 / (lastAt - begunAt), records * 1e9 / (lastCpu - begunCpu), peak);
    }
    System.exit(0);
  }
}
