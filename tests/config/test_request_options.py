"""Per-request switches as they arrive in process and over HTTP."""

from __future__ import annotations

import pytest

from speculators_ext.config import ConfigError, RequestOptions
from speculators_ext.request_options import read_options


@pytest.mark.parametrize("args", [None, {}, {"temperature": 3, "other": [1]}])
def test_requests_without_our_keys_are_left_alone(args):
    """Other plugins own other keys; refusing them would break their users."""
    assert RequestOptions.parse(args) == RequestOptions(enabled=True, max_drafts=None)


@pytest.mark.parametrize("value", [0, False, "0", "false", "False"])
def test_drafting_is_switched_off(value):
    """HTTP turns booleans into numbers or strings on some paths."""
    assert RequestOptions.parse({"speculators_ext_enabled": value}).limit(6) == 0


@pytest.mark.parametrize("value", [1, True, "1", "true"])
def test_drafting_stays_on(value):
    """The string "0" is truthy: a plain bool() would get these two groups wrong."""
    assert RequestOptions.parse({"speculators_ext_enabled": value}).limit(6) == 6


@pytest.mark.parametrize(("value", "limit"), [(0, 0), (2, 2), ("2", 2), (99, 6)])
def test_a_cap_lowers_the_depth_and_never_raises_it(value, limit):
    """More than the server reserved room for would write beyond it."""
    assert RequestOptions.parse({"speculators_ext_max_drafts": value}).limit(6) == limit


BAD = [
    ({"speculators_ext_enabled": 2}, "speculators_ext_enabled=2"),
    ({"speculators_ext_enabled": "yes"}, "speculators_ext_enabled='yes'"),
    ({"speculators_ext_enabled": None}, "speculators_ext_enabled=None"),
    ({"speculators_ext_enabled": [1]}, "speculators_ext_enabled=[1]"),
    ({"speculators_ext_max_drafts": -1}, "speculators_ext_max_drafts=-1"),
    ({"speculators_ext_max_drafts": True}, "speculators_ext_max_drafts=True"),
    ({"speculators_ext_max_drafts": 1.5}, "speculators_ext_max_drafts=1.5"),
    ({"speculators_ext_max_drafts": "-1"}, "speculators_ext_max_drafts='-1'"),
    ({"speculators_ext_max_drafts": "\u00b2"}, "speculators_ext_max_drafts="),
    ({"speculators_ext_max_draft": 1}, "did you mean 'speculators_ext_max_drafts'?"),
    ({"speculators_ext_zzz": 1}, "unknown key 'speculators_ext_zzz'"),
]


@pytest.mark.parametrize(("args", "part"), BAD, ids=[str(case[0]) for case in BAD])
def test_a_bad_value_is_one_line_with_its_key(args, part):
    """A superscript two is a digit to str.isdigit, and int() would raise a bare ValueError."""
    with pytest.raises(ConfigError) as caught:
        RequestOptions.parse(args)
    assert part in str(caught.value)
    assert "accepted" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("given", [*(case[0] for case in BAD), [1]], ids=str)
def test_a_lossy_method_serves_exactly_what_it_cannot_read(given):
    """Catches a mistyped key that leaves a request to the server's threshold, or to none."""
    options, warning = read_options(given, "extra_args", least_threshold=0.0)
    assert options == RequestOptions(exact=True)
    assert warning.endswith("; the request is served exactly: no step of it is judged")
    assert "\n" not in warning
    options, warning = read_options(given, "extra_args")
    assert options == RequestOptions()
    assert warning.endswith("; the request is served with default options")


@pytest.mark.parametrize(
    ("asked", "least", "exact"),
    [(-2.5, 0.0, True), (0, 0.0, False), (99, 0.0, False), (-9, -1000.0, False)],
)
def test_a_threshold_below_the_scale_is_served_exactly(asked, least, exact):
    """Catches a log-probability sent to a judge of digits, where it lets everything pass."""
    options, warning = read_options({"speculators_ext_threshold": asked}, "extra_args", least)
    assert options.exact is exact
    assert options.threshold == (None if exact else asked)
    assert (warning is not None) is exact
    assert warning is None or "speculators_ext_threshold=-2.5 is below" in warning
