"""The paper's experiments and those beyond it: cells to run, result files, figures, tables, claims and their check.

`commands` is `niss reproduce`. `design` says what is compared, `figure3`, `figure4` and `beyond` run it through
`runner` into the files of `results`; `tables`, `comparisons`, `chart` and `text` are made from those files alone, and
`claims.check_claims` recomputes what the text claims, which is what `niss verify` does.
"""
