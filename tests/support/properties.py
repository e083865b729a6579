"""How many examples properties are tried with, and which: the same ones in every run of `make test`.

An example that nobody has tried before may show a fault that has been there for long. In `make test` it would refuse a
commit that has nothing to do with it, once in some hundred runs. So each property meets the same examples there,
whatever else runs in its process, until its own text changes or another version of hypothesis comes; new ones are
looked for by `make soak-properties`, which draws at random and many times as many.
"""

from __future__ import annotations

import hypothesis
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

FIXED, RANDOM = "fixed", "random"
"""Names of profiles, for `--hypothesis-profile`."""

EXAMPLES = 50
TIMES = 40
"""So many times as many at random."""


def register_profiles() -> None:
    """Has the fixed examples tried where nobody asks for others; before a module with properties is imported."""
    # How long an example takes says more of what else runs here than of the code; tests have a limit of their own.
    common = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    settings = hypothesis.settings
    settings.register_profile(FIXED, common, max_examples=EXAMPLES, derandomize=True, database=None)
    settings.register_profile(RANDOM, common, max_examples=EXAMPLES * TIMES, derandomize=False, print_blob=True)
    settings.load_profile(FIXED)
    _same_constants_whatever_is_imported()


def examples(count: int) -> int:
    """For properties that say how many: `count` of the fixed ones, and as many times as many at random as others."""
    return count * hypothesis.settings.default.max_examples // EXAMPLES


def _same_constants_whatever_is_imported() -> None:
    """Hypothesis also draws numbers and words that stand in our modules, those that have been imported by then: which
    these are depends on what ran before in the process, and so would the examples of one seed. Fixed ones have none.

    By a private function, as no setting leaves them out (6.170): `derandomize` fixes the seed alone, and a `backend` of
    our own would draw everything else in another way, too. Where it is called otherwise one day, this fails at once.
    """
    of_modules, none = providers._get_local_constants, Constants()
    providers._get_local_constants = lambda: none if hypothesis.settings.default.derandomize else of_modules()
