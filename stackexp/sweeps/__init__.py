"""Many runs of one study: which they are, where they run, and what has come of them. The run folders are the record."""
