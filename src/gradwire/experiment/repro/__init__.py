"""Published tables, measured again: `gradwire repro NAME`.

A recipe is one file: what is run, and the published figures that its results stand beside
(`published/`, values of arXiv 2003.06307 and of a thesis on polar codes, Tongji University 2022).
`recipe.py` says what a recipe is, `trained.py` does those that train networks, cell by cell, by a
sweep that can be interrupted; `table.py` is what comes out, `kept.py` what stays in the repository.
Begin with `survey.py`.
"""
