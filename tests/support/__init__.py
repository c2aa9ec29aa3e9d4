"""What the tests of several folders share: the keeper, the state oracle, the leak guard, the zoo's
launcher.
"""

import pytest

# their asserts tell what they compared
pytest.register_assert_rewrite("support.trip", "support.aftermath", "support.zoo")
