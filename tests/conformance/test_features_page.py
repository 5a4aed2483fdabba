"""`docs/features.md` is what the rows of the suite and the tests beside it say."""

from features import PAGE, page
from suite import all_rows


def test_the_page_is_what_the_tests_say() -> None:
    assert PAGE.read_text() == page(), "run `make features`"


def test_every_row_of_the_suite_is_on_the_page() -> None:
    text = PAGE.read_text()
    assert [row.__name__ for row in all_rows() if f"`{row.__name__}`" not in text] == []
