"""The Flower engine: asks travel as Flower messages, through a SuperLink, to nodes of ours.

Only this package imports flwr. Three processes of a federation use it:

    link     `python -m harmonium.engines.flower.superlink`: Flower's SuperLink, served twice: all
             of it on loopback for the server, which must know a secret, `/v1/fleet` alone for sites
    server   `Link` starts and watches the link and is the one executor of its one run;
             `FlowerMessenger` pushes messages and polls answers
    node     `answer_messages` stays connected and answers one message after another in one process

A node speaks Flower's Fleet protocol by Flower's own client, but it never fetches an app: whatever
a SuperLink offers, only the installed Harmonium runs. Bodies are frames of `harmonium.core.codec`.
"""

import os

from harmonium.core.paths import home

CHUNK = 8 << 20  # bytes of an array that travel in one piece
WHY_HEADER = "x-harmonium-why"  # in the response to a node that is not admitted
UNKNOWN, CONNECTED = "unknown", "connected"  # its first word; seconds to wait may follow

# Flower reads these when it is imported: no telemetry, no update check, no installation.
os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
os.environ["FLWR_HOME"] = str(home() / "flower")  # where it keeps its telemetry data
os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
os.environ["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
os.environ["FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE"] = str(CHUNK)
