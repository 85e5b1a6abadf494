"""The cache against a naive model: see tests/cache_machine.py."""

from __future__ import annotations

from cache_machine import CacheMachine, at_length

TestPrefixCacheAgainstANaiveModel = CacheMachine.TestCase
TestPrefixCacheAgainstANaiveModelAtLength = at_length(CacheMachine)
