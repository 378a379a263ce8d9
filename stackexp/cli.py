"""The command line: one table of verbs.

The verb `data prepare` is the class `Prepare` in `stackexp.verbs.data`. To add a verb, write a subclass of
`stackexp.verbs.parser.Verb` and add a line here.
"""

from stackexp.verbs.dispatch import dispatch

VERBS = {
    "fit": "train the model of a config",
    "validate": "score a run on its validation sets",
    "test": "score a run on its test sets",
    "evaluate": "score a run on downstream benchmarks",
    "generate": "continue a text with a trained model",
    "inspect": "show what the stacks of a run do",
    "certify": "compare a run with the automaton of its task",
    "configs list": "list the shipped configs, recipes and section choices",
    "configs show": "print a resolved config with its size and cost",
    "configs explain": "explain a config key, or print all of them",
    "data prepare": "turn text or token files into token shards",
    "data fetch": "download OLMo's validation sets V2 and V3",
    "data english": "build an English corpus from Debian packages",
    "data retokenize": "convert token files to another tokenizer",
    "data inspect": "show the contents of a dataset and verify its files",
    "plan": "estimate memory, time and cost of a training run",
    "match": "find the size at which two models cost the same",
    "verdict": "decide whether a memory helps",
    "sweep run": "run the missing trials of a sweep",
    "sweep status": "show the state of each trial",
    "sweep stop": "checkpoint and stop the running trials",
    "sweep results": "compare the finished trials",
    "runs list": "list runs with their state and losses",
    "runs show": "show one run and how to resume it",
    "runs copy": "copy what reports read of finished runs",
    "runs remove": "delete run folders",
    "report compare": "compare runs in one table",
    "report formal": "compare runs with the paper's formal languages",
    "report ablation": "compare variants with the paper's ablation",
    "report scaling": "fit the loss against parameters and tokens",
    "report benchmarks": "compare runs on downstream benchmarks",
    "report dynamics": "compare the training losses over the tokens",
    "report grid": "show the loss over the hyperparameters of a sweep",
    "report actions": "show pushes and pops over the layers",
    "report states": "show how states drift with the length of strings",
    "report efficiency": "compare the cost of memories with the paper's",
    "report all": "write one page with all tables and figures of a folder",
    "bench efficiency": "measure the cost of a memory in a full model",
    "completion": "print a completion script for bash or zsh",
    "checkpoint average": "average the weights of a run's last checkpoints",
    "checkpoint export": "write a checkpoint as a Hugging Face folder",
    "checkpoint consolidate": "write a checkpoint's weights to one safetensors file",
    "checkpoint import": "read the weights of a Hugging Face folder",
}


def main(argv: list[str] | None = None) -> int:
    """Run the verb named by `argv` (default: the process arguments) and return its exit code."""
    return dispatch(VERBS, argv)
