"""Against its peers: the same trials for every method, targets fixed beforehand, time to target.

`tasks/` says what is trained, `methods.py` what is compared, `spaces.py` what is searched. `run.py` trains once,
`protocol.py` says what is still to run, `store.py` keeps the records, `timing.py` times steps apart from training.
`analysis.py`, `figures.py` and `page.py` are functions of the records.
"""
