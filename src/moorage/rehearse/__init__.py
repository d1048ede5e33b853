"""`moorage rehearse`: run a job undisturbed, run it again with checkpoints and restores, and compare what it wrote.

`spec` reads what is declared, `schedule` chooses the instants (pure), `compare` finds the first difference (pure),
`run` does it, `report` and `plot` tell of it (pure).
"""
