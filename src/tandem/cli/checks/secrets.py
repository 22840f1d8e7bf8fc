"""API keys and the admin token."""

from __future__ import annotations

import stat
from collections.abc import Iterator

from tandem.cli.checks import Check
from tandem.config import Settings

_SHORTEST_SECRET = 16


def keys_checks(settings: Settings) -> Iterator[Check]:
    """Whether this machine has the secrets, and keeps them private. Missing ones may be fine on one's own machine."""
    for name, file in (("api_key", settings.api_key_file), ("admin_token", settings.admin_token_file)):
        variable = f"TANDEM_{name.upper()}"
        secret = settings.secret(name)  # type: ignore[arg-type]
        if file is not None and file.stat().st_mode & stat.S_IROTH:
            yield Check("warn", variable, f"every user can read {file}", f"chmod 600 {file}")
        elif secret:
            yield Check("ok", variable, "set")
        elif name == "admin_token":
            yield Check("warn", variable, "not set", "`tandem up` makes one; separate containers need the same one")
        elif settings.controller_host in ("127.0.0.1", "localhost", "::1"):
            yield Check("warn", variable, "not set: only this machine can use the controller", f"set {variable}")
        else:
            found = f"not set, and the controller binds to {settings.controller_host}"
            yield Check("fail", variable, found, f"set {variable}, or TANDEM_CONTROLLER_HOST=127.0.0.1")


def required_secrets(settings: Settings, *, admin: bool) -> Iterator[Check]:
    """Whether the secrets of a deployment's containers are set, long and different; the token only with `admin`."""
    keys, token = settings.api_keys, settings.secret("admin_token") or ""
    required = {"TANDEM_API_KEY": keys} | ({"TANDEM_ADMIN_TOKEN": [token] if token else []} if admin else {})
    for variable, values in required.items():
        if not values:
            yield Check("fail", variable, "empty or not set", "run secrets/create, or set it or its _FILE")
        elif min(map(len, values)) < _SHORTEST_SECRET:
            yield Check("warn", variable, f"shorter than {_SHORTEST_SECRET} characters", "run secrets/create")
        else:
            yield Check("ok", variable, "set")
    if token and token in keys:
        found = "is one of the API keys: everybody who may sample could change the served adapters"
        yield Check("fail", "TANDEM_ADMIN_TOKEN", found, "use a token of its own")
