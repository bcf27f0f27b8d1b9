"""A tab of a real Chromium, for the tests that look at pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from browser import Page, chromium_page, find_chromium


@pytest.fixture(scope="module")
def page(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Page]:
    program = find_chromium()
    if program is None:
        reason = "no Chromium is installed; `python tests/unit/report/browser.py` installs it"
        plugins = request.config.pluginmanager
        with plugins.getplugin("capturemanager").global_and_fixture_disabled():
            plugins.getplugin("terminalreporter").write_line(f"skipped: {reason}")
        pytest.skip(reason)
    with chromium_page(program, tmp_path_factory.mktemp("profile")) as page:
        yield page
