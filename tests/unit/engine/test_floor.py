from engine_driver import LINK, Driver
from fakes import ScriptedRunner, generate_request

from workers.engine.queueing.floor import SHARE, BatchFloor


def test_batch_is_below_its_floor_only_with_less_than_its_share_of_both_counts():
    floor = BatchFloor(64)
    assert not floor.due, "nothing ran: nothing is owed"
    for step in range(100):
        floor.count(step * 0.01, (0, 0), (100, 10))
    assert floor.due
    floor.count(1.0, (0, 60), (0, 0))
    assert not floor.due
    for step in range(2000):
        floor.count(1.0 + step * 0.01, (50, 0), (100, 10))
    assert not floor.due


def test_a_batch_prompt_gets_its_share_beside_interactive_work_that_never_ends():
    drive = Driver(ScriptedRunner(num_blocks=400, block_size=4), max_batch_tokens=40, max_running=16)
    drive.send(generate_request("job", [5] * 200, 4, tier="batch"))
    number = num_batch = num_all = 0
    while (LINK, "job") not in drive.endings:
        while drive.scheduler.num_waiting < 3:
            number += 1
            drive.send(generate_request(f"chat{number}", [number % 250, *[7] * 60], 2))
            if len(drive.inbox) > 3:
                break
        drive.step()
        for row in drive.runner.steps[-1]:
            num_all += len(row.tokens)
            num_batch += len(row.tokens) * (row.tokens[0] == 5 and len(row.tokens) < 61)
        assert number < 2000, "batch was kept out"
    assert num_batch >= 0.7 * SHARE * num_all
