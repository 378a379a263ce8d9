"""The report on formal languages: the paper's Table 1 with our scores."""
