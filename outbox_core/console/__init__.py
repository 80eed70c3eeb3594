"""The console: one page for the person on call, on what an outbox does, holds and has done, with the actions for it.

`Console` answers requests that are plain data. Three doors serve it:

- `outbox console`, on the machine's own address or behind a token (`outbox_core.console.server`);
- `outbox_core.console.asgi` and `.wsgi`: applications to mount in another one, which says who its users are;
- a view in Django's admin (`outbox_django`).

The page itself is `page/`, files without a build step; what it shows and does is `api/...`, in `reading.py` and
`actions.py`.
"""

from outbox_core.console.access import Permission, User
from outbox_core.console.console import Console

__all__ = ["Console", "Permission", "User"]
