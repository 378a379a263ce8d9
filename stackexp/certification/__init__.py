"""Extract the automaton of a trained network and compare it with the automaton of its task, for `certify`."""
