"""Whether a part of a federation is alive, for health checks: `healthy.py tracker|server|node`; exit code 0 if it is.

The tracker is asked whether it reaches its store. A SuperLink and a SuperNode say nothing of the kind without a further
port: that they accept connections, and the SuperLink TLS, must do.
"""

import os
import socket
import ssl
import sys
import urllib.request

_SECONDS = 8.0
_PORTS = {"tracker": 8440, "server": 8000, "node": 9094}


def main() -> None:
    """Ends with 0, or with an exception."""
    part = sys.argv[1]
    port = int(os.environ.get("NISS_PORT", _PORTS[part]))
    # Alive, not who: the certificate is for the machine's name, and those who come from outside check it.
    anyone = ssl.create_default_context()
    anyone.check_hostname, anyone.verify_mode = False, ssl.CERT_NONE
    if part == "tracker":
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/healthz", context=anyone, timeout=_SECONDS):
            return
    with socket.create_connection(("127.0.0.1", port), timeout=_SECONDS) as plain:
        if part == "server":
            anyone.wrap_socket(plain).close()


if __name__ == "__main__":
    main()
