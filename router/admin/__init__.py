"""The admin port: health, metrics, the fleet and its control, on a listener of its own and away from the request path.

server.py is the listener and its routes, access.py says who may change something, control.py what can be changed,
backend_view.py, config_view.py and explanation.py make the three answers that are long.
"""

from router.admin.control import FleetControl
from router.admin.server import AdminServer

__all__ = ["AdminServer", "FleetControl"]
