"""The forecast: pages in use and sequences that run at future steps, and the admissions that it allows."""
