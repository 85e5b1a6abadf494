"""The images' health check: is the process of this container alive? `/livez`, not `/readyz`: a container engine restarts
what is unhealthy, and a gateway whose database is away is not made well by a restart.
"""

from __future__ import annotations

import http.client
import sys


def is_alive(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=4)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(0 if is_alive(int(sys.argv[1])) else 1)
