"""The forms in which a key could appear in a text, for tests that keys are not printed."""

from __future__ import annotations

import base64


def forms_of(key: bytes) -> list[str]:
    """Return the key raw, as hexadecimal, as Python prints it, and inside longer base64 texts."""
    inside = [base64.b64encode(bytes(shift) + key)[4:-4].decode() for shift in range(3)]
    shifted = [base64.b64encode(key[shift : shift + 24]).decode() for shift in range(3)]
    return [key.decode("latin-1"), key.hex(), key.hex().upper(), repr(key)[2:-1], *inside, *shifted]
