"""fp16 training with overflowing first steps: averages in the log."""

from tests.functional.launch import train


def test_shares_stay_shares_where_steps_are_skipped(data):
    run = train(
        {
            "--data-path": data,
            "--num-layers": 1,
            "--fp16": True,
            "--initial-loss-scale": 2.0**21,
            "--hysteresis": 1,
            "--global-batch-size": 2,
            "--train-iters": 8,
            "--log-interval": 8,
        }
    )
    line = run.steps[-1]
    assert line["iteration"] == 8 and 4 <= line["number of skipped iterations"] < 8
    shares = {name: value for name, value in line.items() if name.startswith("dsa ")}
    assert set(shares) == {"dsa attention mass captured", "dsa query overlap"}
    assert all(0 <= share <= 1 for share in shares.values()), shares
    assert shares["dsa attention mass captured"] > 0.2
