"""`python -m scheduler.replay FILE`."""

import sys

from scheduler.replay.replay import main

sys.exit(main())
