"""The progress bar of work outside of training."""

from stackexp.progress_bar import open_bar


def test_a_log_gets_the_first_and_the_last_frame_as_lines(capsys):
    for _ in open_bar(range(10), desc="reading"):
        pass
    printed = capsys.readouterr().err
    assert "\r" not in printed
    first, last = printed.splitlines()
    assert first.startswith("reading:   0%")
    assert last.startswith("reading: 100%")
    assert len(last) <= 80


def test_a_bar_that_is_removed_at_its_end_leaves_no_empty_line(capsys):
    with open_bar(desc="set.npy", total=3, leave=False) as bar:
        bar.update(3)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("set.npy:   0%")


def test_a_disabled_bar_prints_nothing(capsys):
    assert list(open_bar(range(3), disable=True)) == [0, 1, 2]
    assert capsys.readouterr().err == ""
