"""`niss up`: a whole federation on one machine, as the processes that several machines would run.

`deployment` makes the keys, starts and configures everything, and `processes` takes it all down again, also where its
owner is killed.
"""
