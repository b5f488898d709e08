"""The membership of a job: the scheduler's list, and how each node joins and follows changes.

Promises: every node sees joins and losses in the same order; a node that returns has a higher
incarnation; a node that was declared lost cannot continue under its old identity.
Open first: membership_list.py (the rules, without sockets), then views.py.
"""
