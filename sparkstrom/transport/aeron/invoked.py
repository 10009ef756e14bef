"""A client of a media driver without a thread and without kernels: whoever has it does its duties.

For what must work before anything is compiled.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sparkstrom.transport.aeron.checked import Aeron, ffi, harmless


def invoked_client(aeron: Aeron, aeron_directory: Path, name: str, closing: ExitStack) -> Any:
    """Connect; ``closing`` gets what ends it. Raise TransportError where there is no driver."""
    lib, checked = aeron.lib, aeron.checked
    holder = ffi.new("aeron_context_t **")
    checked(lib.aeron_context_init(holder), f"making the {name} client's context")
    context = holder[0]
    closing.callback(lib.aeron_context_close, context)
    for setting, value in (
        ("dir", os.fsencode(aeron_directory)),
        ("client_name", name.encode()),
        ("use_conductor_agent_invoker", True),
    ):
        setter = getattr(lib, f"aeron_context_set_{setting}")
        checked(setter(context, value), f"setting {setting}")
    # The default handler ends the process. What another is told, ``still_runs`` sees as well.
    checked(
        lib.aeron_context_set_error_handler(context, harmless(lib), ffi.NULL),
        "setting the error handler",
    )
    holder = ffi.new("aeron_t **")
    checked(lib.aeron_init(holder, context), f"connecting the {name} client")
    closing.callback(lib.aeron_close, holder[0])
    checked(lib.aeron_start(holder[0]), f"starting the {name} client")
    return holder[0]


def still_runs(aeron: Aeron, client: Any) -> bool:
    """Do the client's duties; False once it or its media driver has given up."""
    lib = aeron.lib
    return lib.aeron_main_do_work(client) >= 0 and not lib.aeron_is_closed(client)
