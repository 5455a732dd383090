"""Health check of the image: exits with 0 if a process of the container answers at `/healthz`.

`aioflow run` and `aioflow jobmanager` serve it at AIOFLOW_MONITOR, `aioflow taskmanager` at
AIOFLOW_HEALTH. The image sets both.
"""

import os
import sys
import urllib.request

ports = {
    os.environ[name].rpartition(":")[2]
    for name in ("AIOFLOW_MONITOR", "AIOFLOW_HEALTH")
    if os.environ.get(name)
}
reasons = []
for port in sorted(ports):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2):
            sys.exit(0)
    except OSError as error:
        reasons.append(f"port {port}: {error}")
sys.exit("; ".join(reasons) or "neither AIOFLOW_MONITOR nor AIOFLOW_HEALTH is set")
