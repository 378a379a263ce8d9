"""Check the options of text generation, without importing torch."""

MIN_TEMPERATURE = 1e-3


def find_sampling_error(max_new_tokens: int, temperature: float, top_p: float, seed: int) -> str | None:
    """Return an error message that begins with the name of an option, or None if all options are valid."""
    if max_new_tokens < 1:
        return f"max_new_tokens {max_new_tokens}: must be at least 1"
    if temperature and not MIN_TEMPERATURE <= temperature < float("inf"):
        return f"temperature {temperature}: must be 0 (greedy) or a number >= {MIN_TEMPERATURE}"
    if not 0 < top_p <= 1:
        return f"top_p {top_p}: must be a number in (0, 1]"
    return None if 0 <= seed < 2**63 else f"seed {seed}: must be an integer from 0 to 2^63 - 1"
