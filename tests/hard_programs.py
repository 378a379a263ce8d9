"""The Python list and deque that hard actions are held against."""


def apply_hard(memory, operation, value, capacity):
    """What S slots hold: the end of a list or deque is the top; a push into a full one drops the oldest element."""
    if operation == "push":
        memory.append(value)
        if len(memory) > capacity:
            del memory[0]
    elif operation == "pop" and memory:
        memory.pop() if isinstance(memory, list) else memory.popleft()
