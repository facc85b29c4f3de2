# SPDX-License-Identifier: Apache-2.0
"""Recoveries are logged below the package's logger; the command line prints warnings."""

import logging

from speccompile.bundle.stage_cache import StageCache
from speccompile.cli.output import show_warnings
from speccompile.errors import RuntimeFault
from tests.runtime.scheduler_lab import Bench


def test_a_scheduler_that_resets_its_caches_says_so(caplog, monkeypatch):
    bench = Bench()
    bench.submit([1, 2, 3])
    bench.step()

    def failing(feeds, first_slot=0):
        raise RuntimeFault("engine target", "a fault", "none", "Try again.")

    monkeypatch.setattr(bench.target, "run", failing)
    bench.step()
    [record] = caplog.records
    assert (record.name, record.levelname) == ("speccompile.runtime.scheduler", "WARNING")
    assert "1 sequences end and the caches are reset" in record.message and "a fault" in record.message


def test_a_damaged_entry_of_the_cache_and_one_that_is_evicted_are_named(caplog, tmp_path):
    caplog.set_level(logging.INFO, "speccompile")
    cache = StageCache(tmp_path / "cache", limit_bytes=1000)

    def fetch(key, dest):
        return cache.fetch("stage", key, dest, lambda folder: (folder / "a").write_text("x" * 600))

    assert not fetch("k" * 64, tmp_path / "one") and not caplog.records
    (tmp_path / "cache/stage" / ("k" * 64) / "result/a").write_text("y")
    assert not fetch("k" * 64, tmp_path / "two")
    assert [(r.levelname, "done again" in r.message) for r in caplog.records] == [("WARNING", True)]
    assert not fetch("l" * 64, tmp_path / "three")
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"] and "1000 bytes" in caplog.text


def test_the_command_line_prints_warnings_once_and_the_library_nothing(capsys):
    logger = logging.getLogger("speccompile")
    before = list(logger.handlers)
    assert any(isinstance(handler, logging.NullHandler) for handler in before)
    try:
        show_warnings()
        show_warnings()
        logging.getLogger("speccompile.toy").warning("a %s", "thing")
        logging.getLogger("speccompile.toy").info("a detail")
        assert capsys.readouterr().err == "warning: a thing\n"
    finally:
        logger.handlers[:] = before
