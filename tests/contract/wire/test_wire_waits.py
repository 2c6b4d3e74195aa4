"""What a call waits for, in a header before its answer."""

from teacher_logits.wire.waits import waits_from_metadata, waits_to_metadata


def test_a_text_crosses_and_what_is_too_long_is_cut() -> None:
    assert waits_from_metadata(waits_to_metadata("no teacher 'é'")) == "no teacher 'é'"
    assert len(waits_from_metadata(waits_to_metadata("x" * 5000))) == 1024


def test_a_server_that_says_nothing_is_heard_to() -> None:
    assert waits_from_metadata(None) == ""
    assert waits_from_metadata([("other-bin", b"x"), ("teacher-logits-waits-for-bin", "x")]) == ""


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    assert waits_from_metadata(waits_to_metadata("a\x1b[2J\nb")) == "a?[2J?b"
