"""Proxies of the environment: nothing of ours goes by them, and other tools might."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from teacher_logits_client.doctor.findings import Finding, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

    from teacher_logits.addresses import Address
    from teacher_logits.errors import Fact


def proxy_finding(
    names: Sequence[str], exempt: Sequence[str] = (), *, address: Address | None = None
) -> Finding:
    """Say that proxies do not matter to us, and whom else they would catch at an address.

    Args:
        names: of the variables that name a proxy.
        exempt: hosts, domains and networks that go past it (``no_proxy``).
        address: of the server to visit.
    """
    caught = bool(names) and address is not None and is_caught(address, exempt)
    if not names:
        message = "the environment names none"
    else:
        message = (
            f"the environment sets {', '.join(names)}, which are ignored: connections go straight "
            "to the server"
        )
    if caught and address is not None:
        message += (
            f"; other programs that speak gRPC would be sent by the proxy to {address}: for them "
            f"add {address.host} to no_proxy"
        )
    facts: dict[str, Fact] = {"names": ",".join(names), "would_catch": caught}
    return Finding(name="proxies", verdict=Verdict.OK, message=message, facts=facts)


def is_caught(address: Address, exempt: Sequence[str]) -> bool:
    """Whether gRPC elsewhere would take a proxy: TCP, and no exempt host ends the address' name.

    As gRPC matches them: ``example.com`` is also ``a.example.com``; a network is ``10.0.0.0/8``.
    """
    if address.is_unix:
        return False
    return not any(_is_exempt(address.host.lower(), each.lower()) for each in exempt)


def _is_exempt(host: str, entry: str) -> bool:
    if entry == "*":
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return bool(entry) and host.endswith(entry.lstrip("*"))
