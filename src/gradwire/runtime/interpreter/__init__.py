"""The interpreter: the loop that steps programs and answers their effects, shared by all engines.

It promises that every engine refuses the same requests with the same text, hands messages of one
sender and tag over in order, and reports a deadlock in the same way. An engine adds its clock and
its transport. Open `interpreter.py` first.
"""
