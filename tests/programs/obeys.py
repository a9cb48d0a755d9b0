"""Executes each line that it reads, and prints in JSON what that calls ``found``, or its error."""

import json
import sys
import threading
import time

import gpuaff

threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
for line in sys.stdin:
    found: object = None
    try:
        exec(line)
    except (gpuaff.GPUAffinityError, ZeroDivisionError) as error:
        found = type(error).__name__
    print(json.dumps(found, default=sorted))
    sys.stdout.flush()
