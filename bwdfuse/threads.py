"""How many threads a native step on CPU may use."""

from bwdfuse._native import native


def set_num_threads(n: int) -> None:
    """Sets how many threads a native step on CPU may use from now on, the calling thread among them.

    The bits of a step do not depend on it. Threads are created by the first step that needs them, that is of a parameter
    with at least 131,072 elements for each thread, and sleep between steps. The number is this library's own: it neither
    follows ``torch.set_num_threads`` nor changes it. A forked child (a DataLoader worker, say) inherits the number and
    starts threads of its own when it steps; a step that comes while another Python thread has the helpers runs alone.

    Args:
        n: 1 (no thread but the caller's) to 1024.

    Raises:
        TypeError: n is not an int.
        ValueError: n is out of range.
        BwdFuseError: The native part is missing.

    Example:
        >>> import bwdfuse
        >>> bwdfuse.set_num_threads(2)
        >>> bwdfuse.get_num_threads()
        2
    """
    native().set_num_threads(n)


def get_num_threads() -> int:
    """How many threads a native step on CPU may use, the calling thread among them.

    The default is read once, when the native part is loaded: the first number of the environment variable
    ``OMP_NUM_THREADS`` (what is not a number from 1 is ignored), else the number of CPUs that this process may run on;
    at most 1024.

    Raises:
        BwdFuseError: The native part is missing.
    """
    return native().get_num_threads()
