// Prints the name and the score of each output for one sample without keys, then the column of
// OUTPUT. tests/c.rs compiles this program and runs it.
// usage: outputs TARGET FLASH OUTPUT
#include "hatchback.hpp"

#include <cstdio>

int main(int count, char **arguments) {
    if (count != 4) return 2;
    try {
        const hatchback::process process(arguments[1]);
        const hatchback::model model = process.load(arguments[2]);
        const hatchback::shape shape = model.describe();
        const std::vector<float> dense(shape.dense_features + shape.shared_dense_features);
        const std::uint32_t none[] = {0, 0};
        const std::vector<hatchback::bags> sparse(shape.sparse_features, {nullptr, none, nullptr});
        std::vector<float> scores(shape.outputs);
        hatchback::answer answer{scores, {}, 0};
        hatchback::request request;
        request.samples = 1;
        request.dense = dense;
        request.sparse = sparse;
        model.score(request, answer);
        const std::vector<std::string> names = model.output_names();
        for (std::size_t column = 0; column < names.size(); column++)
            std::printf("%s %.9g\n", names[column].c_str(), scores[column]);
        if (model.top_k(scores, 1) != std::vector<std::uint32_t>{0}) return 3;
        if (model.top_k(scores, 9) != std::vector<std::uint32_t>{0}) return 3;
        std::string values;
        for (const float value : dense) values += (values.empty() ? "" : ",") + std::to_string(value);
        if (model.explain("{\"dense\":[" + values + "]}").find("\"base\"") == std::string::npos) return 3;
        std::printf("%u\n", model.output(arguments[3]));
        return 0;
    } catch (const std::exception &e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }
}
