from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accounting.billing import report_pages
from accounting.values.errors import InvalidError

times = st.integers(0, 2**40)


@given(st.binary(), times, times)
def test_a_page_reads_back_for_its_own_query(query, end, first):
    assert report_pages.read(query, report_pages.write(query, end, first)) == (end, first)


@given(st.binary(), st.binary(), times)
def test_a_page_does_not_fit_another_query(query, other, end):
    page = report_pages.write(query, end, 0)
    if query != other:
        with pytest.raises(InvalidError):
            report_pages.read(other, page)


@given(st.text())
def test_any_other_text_is_refused(text):
    with pytest.raises(InvalidError):
        report_pages.read(b"query", text)
