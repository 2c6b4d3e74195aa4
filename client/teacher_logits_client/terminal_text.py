"""Text of others on a terminal: hosts, students and servers name things, and a terminal obeys some.

What is shown to people goes through ``harmless``, line by line; JSON escapes by itself.
"""

from __future__ import annotations


def harmless(text: str) -> str:
    """Return text with ``?`` for what a terminal would obey, line ends and unseen marks too."""
    return "".join(each if each.isprintable() else "?" for each in text)
