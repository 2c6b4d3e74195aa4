"""When a certificate ends, read from its own bytes: Python tells that of a peer's alone.

    Certificate     SEQUENCE of
      tbsCertificate  SEQUENCE of [0] version, if any; serial number; algorithm; issuer;
        validity        SEQUENCE of notBefore, notAfter; ...                (RFC 5280, 4.1)

A certificate that cannot be read so ends nowhere: the date is for people, and decides nothing.
"""

from __future__ import annotations

import math
import re
import ssl
from datetime import datetime, timezone

_PEM = re.compile(rb"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _LONG = 0xA0, 0x17, 0x80
_BEFORE_VALIDITY = 3
"""Serial number, algorithm, issuer."""
_CENTURY_TURNS = 50
"""Of two digits of a year, from here on 19.. is meant."""


def end_of(chain: bytes) -> float:
    """Return when the first certificate of a PEM file ends, in seconds since 1970; else NaN."""
    found = _PEM.search(chain)
    try:
        if found is not None:
            return _end(ssl.PEM_cert_to_DER_cert(found[0].decode("ascii")))
    except (ValueError, IndexError):
        pass
    return math.nan


def _end(der: bytes) -> float:
    _, certificate, _ = _item(der)
    _, signed, _ = _item(certificate)
    kind, _, rest = _item(signed)
    left = rest if kind == _VERSION else signed
    for _ in range(_BEFORE_VALIDITY):
        _, _, left = _item(left)
    _, validity, _ = _item(left)
    _, _, after = _item(validity)
    kind, end, _ = _item(after)
    text = end.decode("ascii")
    if kind == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY_TURNS else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=timezone.utc).timestamp()


def _item(data: bytes) -> tuple[int, bytes, bytes]:
    """Split off the first item of DER: its tag, what it holds, what comes behind it."""
    tag, length, start = data[0], data[1], 2
    if length >= _LONG:
        start = 2 + length - _LONG
        length = int.from_bytes(data[2:start], "big")
    if len(data) < start + length:
        raise ValueError("cut off")
    return tag, data[start : start + length], data[start + length :]
