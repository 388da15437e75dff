// Nothing of it is needed beyond what NvInfer.h of this folder names.
#pragma once
