"""What can go wrong between a node and its job."""


class JoinError(RuntimeError):
    """A node that could not join the job, or a job that did not become complete."""


class NotAdmittedError(JoinError):
    """The scheduler does not let this node in: it is of another job, or asks for what is not."""


class NoMemberError(RuntimeError):
    """This node was declared lost, or replaced by another process; it cannot go on."""
