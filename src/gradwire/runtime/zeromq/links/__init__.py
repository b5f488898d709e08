"""Numbered messages between two nodes: sent in order, acknowledged, and sent again after a break.

Promises: a receiver gets each message once and in order, or learns that the peer is lost; what is
posted and what is unread is bounded per peer.
Open first: link.py (the numbers of one link, without sockets), then traffic.py (all links).
"""
