"""The paper, claim by claim: from records to tidy tables, from the tables to verdicts, figures and REPRODUCTION.md.

Everything goes one way. `tables` turns records into CSV files; `spectrum` and `propositions` measure what no training
run shows and write CSV files too. `claims` reads those files and nothing else; figures and the document are pure
functions of them, so anyone can check a sentence against a row, and a row against the run it names.
"""
