"""Each error code has an explanation."""

from moorage.model import Code
from moorage.protocol.codes import CLOSE_CODES, CODES, WORTH_RETRYING, Close


def test_every_code_has_a_sentence() -> None:
    assert list(CODES) == list(Code), "one sentence for each, in the order of the codes"
    assert all(text.endswith(".") and len(text) > 20 for text in CODES.values())
    assert len(set(CODES.values())) == len(CODES)


def test_every_close_code_has_a_sentence() -> None:
    named = {value for name, value in vars(Close).items() if not name.startswith("_")}
    assert named == set(CLOSE_CODES)


def test_codes_of_refusals_that_may_succeed_later_are_not_client_errors() -> None:
    assert not WORTH_RETRYING & {Code.BAD_JSON, Code.BAD_MESSAGE, Code.NEVER_FITS, Code.WRONG_TOKEN}
