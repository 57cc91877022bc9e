"""Test tools for engines: a scripted engine, and the checks that every engine passes.

`ScriptedEngine` follows the protocol without any model, so that whatever drives engines can be
tested quickly. `check_engine` puts any engine through the same small stories; it asserts.
"""

from parrot_engine.testing.conformance import ENGINE_CHECKS, check_engine
from parrot_engine.testing.driving import greedy, run_until_idle, tokens_of
from parrot_engine.testing.scripted import Script, ScriptedEngine, fixed_script, hashed_script

__all__ = [
    "ENGINE_CHECKS",
    "Script",
    "ScriptedEngine",
    "check_engine",
    "fixed_script",
    "greedy",
    "hashed_script",
    "run_until_idle",
    "tokens_of",
]
