"""What the tests do with their programs works: here, that a tree ends however it forks."""

from __future__ import annotations

from support.command import Home
from support.keeper import wait_until
from support.leaks import processes_of
from support.zoo import Zoo

# Up to two hundred shells, each of which starts another that starts programs.
FORKING = """
i=0
while [ $i -lt 200 ]; do
    i=$((i + 1))
    (sleep 600 & (sleep 600 & wait) & wait) &
    [ $i -gt 20 ] && echo > many
done
wait
"""


def test_a_tree_that_forks_all_the_time_ends_whole(zoo: Zoo, home: Home) -> None:
    for number in range(3):
        animal = zoo.launch(["sh", "-c", FORKING], name=f"forks-{number}")
        wait_until(
            lambda animal=animal: (animal.folder / "many").exists(), 60, "it has begun to fork"
        )
        animal.end()
        assert processes_of(home.token) == {}
