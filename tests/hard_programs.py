"""A Python list or deque as the expected result of hard actions."""


def apply_hard(memory, operation, value, capacity):
    """Apply one operation in place. The end is the top; a push beyond `capacity` drops the oldest element."""
    if operation == "push":
        memory.append(value)
        if len(memory) > capacity:
            del memory[0]
    elif operation == "pop" and memory:
        memory.pop() if isinstance(memory, list) else memory.popleft()
