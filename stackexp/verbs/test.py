"""The verb `test`."""

from stackexp.verbs.validate import Validate


class Test(Validate):
    """Score a model on every test set, or on --sets: loss, perplexity and bits per byte.

    For formal languages: accuracy at each length up to data.eval_max_length, as a table and a curve.
    """

    stage = "test"
    usage = Validate.usage
    examples = tuple(e.replace("validate", "test", 1) for e in Validate.examples if "--by_position" not in e)
