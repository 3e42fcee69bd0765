"""Rows of docs/compatibility.md that tests of deferred mode prove."""

import pytest


def works(feature: str, section: str = "Ways of training", status: str = "works", note: str = ""):
    return pytest.mark.compatibility(feature, section=section, status=status, note=note, mode="deferred")


def refused(feature: str, note: str, section: str = "Ways of training"):
    return works(feature, section, "refused", note)
