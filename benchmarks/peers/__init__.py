"""One program for each engine that `bench_engines` compares: the same workloads over the same data,
in each engine's own API.

Each takes `name=value` arguments (workload, records, parallelism, data, outputs, rate, seconds) and
prints, as its last line, a JSON object with `outputs` and `checksum`, `steady_per_s` and
`steady_per_cpu_s` (records in, behind the first 30 % of `outputs`, by the clock and by the CPU time
of its process or processes), `peak_mb`; for w5 the latencies instead.
"""
