"""What the paper prints on formal languages."""

from stackexp.config.formal_language import TASKS
from stackexp.reports.formal.collect import paper

PRINTED = """
even_pairs                  1.00 1.00 -    0.49 1.00
parity_check                1.00 1.00 -    0.50 1.00
cycle_navigation            0.89 1.00 -    0.20 1.00
stack_manipulation          0.66 0.85 0.93 0.53 0.92
reverse_string              0.71 0.80 1.00 0.55 1.00
modular_arithmetic_brackets 0.43 0.42 0.30 0.30 0.60
missing_duplicate           0.68 0.67 -    0.53 1.00
odds_first                  0.60 0.55 -    0.51 0.53
binary_addition             0.56 0.51 -    0.48 0.48
binary_multiplication       0.56 0.53 -    0.50 0.48
compute_sqrt                0.64 0.63 -    0.51 0.57
bucket_sort                 0.79 0.75 -    0.79 0.89
"""  # LSTM, StackRNN, StackAttn, Transformer, StackTrans


def test_the_paper_has_twelve_of_our_tasks_and_five_models():
    assert set(paper.TASKS) == set(TASKS)
    assert set(TASKS) - set(paper.TABLE_1) == {"modular_arithmetic", "solve_equation", "duplicate_string"}
    assert list(paper.TABLE_1) == [task for task in paper.TASKS if task in paper.TABLE_1], "in the paper's order"
    for line in PRINTED.strip().splitlines():
        task, *scores = line.split()
        expected = dict(zip(paper.MODELS, scores, strict=True))
        assert paper.TABLE_1[task] == {model: float(score) for model, score in expected.items() if score != "-"}
    assert len(PRINTED.strip().splitlines()) == len(paper.TABLE_1)
    assert "StackAttn" not in paper.TABLE_1["bucket_sort"]
    assert len([score for task in paper.TABLE_1.values() for score in task.values()]) == 12 * 4 + 3
