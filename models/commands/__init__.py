"""Commands of ``python -m models`` that read scans which are not a run's own.

Beside ``cli.py`` this folder alone knows the data module.
"""
