"""The handed training cases, one test function per case ID (`test_T1_...`), one file per group."""
